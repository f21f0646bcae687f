"""A sibling for relative imports."""


def shout(text):
    return f"{__name__}: {text.upper()}"
