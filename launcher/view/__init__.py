"""What people see: of one job, of its incidents, of the cluster. Values and text; nothing here acts."""
