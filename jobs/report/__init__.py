"""`chatjobs report`: one HTML page about runs, from their files alone."""
