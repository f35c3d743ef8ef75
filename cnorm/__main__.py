"""``python -m cnorm``: the command ``cnorm``."""

from cnorm.tools.cli import main

if __name__ == "__main__":
    main()
