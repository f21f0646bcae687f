"""Modules that lie beside the script can be imported; a name of the standard library isn't shadowed."""

import json

from sibling_helper import Greeter

print(Greeter("there").greet(), Greeter.__module__, json.__name__)
