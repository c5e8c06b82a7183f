"""Files of tenants on the results disk: uploads, and what batches have written."""
