"""Where every option's value comes from: the command line, variables, a YAML file; and what says so."""
