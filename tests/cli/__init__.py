"""The command line, run as a user runs it: a process, its streams, its exit status."""
