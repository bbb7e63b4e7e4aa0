"""Code and configs of users outside of the repository."""
