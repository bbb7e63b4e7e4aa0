"""Images and video frames from files, by stated rules, with one-line errors that name the file."""
