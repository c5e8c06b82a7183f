"""The gateway's API as an OpenAPI document, made of the types that check the requests."""
