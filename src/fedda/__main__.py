"""Run the command with `python -m fedda`."""

from fedda.cli.main import main

if __name__ == "__main__":
    main()
