"""The command line: `headrace`. Commands in main.py; this package prints, everything else is the API's."""
