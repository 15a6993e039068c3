"""What people see in a terminal: what to do next, what is being waited for, and the completion of their shell."""
