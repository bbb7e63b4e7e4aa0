"""The user's own data: pictures and videos with questions, from a file, a folder or memory."""
