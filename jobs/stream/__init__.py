"""The token stream of a job: its entries on the wire, and the reader's cursor."""
