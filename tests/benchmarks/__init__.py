"""What takes how long: each file is a command that prints one table. No test runs them."""
