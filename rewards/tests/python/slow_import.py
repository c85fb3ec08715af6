"""Never finishes being imported, and has a child by then."""

import os

CHILD = os.fork()
with open("importing", "a") as file:
    file.write(f"{os.getpid()}\n")
while True:
    pass
