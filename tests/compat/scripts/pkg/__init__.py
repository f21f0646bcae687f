"""A package that is run with -m."""

WHERE = __name__
