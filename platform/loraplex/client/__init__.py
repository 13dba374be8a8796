"""The management and inference client that the command line, the supervisor and the demo share; knows no terminal."""
