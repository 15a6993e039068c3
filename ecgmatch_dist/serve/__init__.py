"""`ecgmatch serve`: a page to drop ECG files on, and the same as JSON for programs (docs/predict.md).

upload.py      a request -> the files in it
desk.py        files -> answers, several clients at once, one model
command.py     the routes and the command
drop.*         the page
"""
