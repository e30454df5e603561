"""What tests of elastic training need, also those of other projects: fault injection. Nothing here runs unasked."""
