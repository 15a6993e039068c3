"""`ecgmatch label`: a person answers, the bank asks. From a folder of unlabelled ECGs to labels and a model.

`journal` keeps every answer, `answers` what they come to, `agreement` compares readers.
"""
