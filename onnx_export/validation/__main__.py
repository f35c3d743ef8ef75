from .command import validate

validate(prog_name="cnorm validate")
