"""The command line: `minivllm generate`, `race`, `bench`, `model`.

Owns flags, help, exit statuses and what a terminal shows. Each command is a file: it adds its flags in `add_to` and
does its work below. Must not know how anything is computed: a command imports what it needs when it runs, so that help
is instant.

Read `main` (the way in and out), `arguments`, then a command. `terminal` is about streams, signals and files.
"""
