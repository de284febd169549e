"""Other libraries on the problem of the test vectors. README.md has the result."""
