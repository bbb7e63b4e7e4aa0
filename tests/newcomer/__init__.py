"""What a new user does in the first hour, as it is typed."""
