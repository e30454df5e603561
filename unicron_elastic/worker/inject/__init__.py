"""The folder put on PYTHONPATH so that Python itself runs ``sitecustomize`` here when a worker's interpreter starts."""
