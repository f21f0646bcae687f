"""The guard holds: the body runs once, as __main__, and the module can be imported under its own name too."""

import sys

COUNT = 0


def main():
    global COUNT
    COUNT += 1
    import main_guard

    print(__name__, COUNT, main_guard.COUNT, main_guard.__name__, sys.modules["__main__"].COUNT)


if __name__ == "__main__":
    main()
