"""The command line: a file per verb, put together in `kvist.cli.main`."""
