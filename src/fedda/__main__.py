"""Run the command with `python -m fedda`."""

from fedda.cli import main

if __name__ == "__main__":
    main()
