"""From a command line to running ranks. The parent process imports no torch."""
