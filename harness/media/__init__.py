"""Images and video frames from files, sampled by named rules, with one-line errors that name the file."""
