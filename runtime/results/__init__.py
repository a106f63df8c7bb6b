"""What a run leaves on disk: journal while it runs, tables and arrays once it is done, and how to read them."""
