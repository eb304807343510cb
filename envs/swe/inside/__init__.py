"""Programs that run inside sandboxes, as plain files with the standard library alone; never imported outside."""
