"""The token stream of a job: its entries on the wire, their writer, the reader's cursor."""
