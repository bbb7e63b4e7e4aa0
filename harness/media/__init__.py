"""Images and video frames from files, sampled by named rules, with one-line errors that name the file."""

#: Values of `model.transparency`; here, so that settings are checked without Pillow and numpy.
TRANSPARENCY = ("drop", "white")
