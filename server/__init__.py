"""The face over HTTP: OpenAI's endpoints, the native one, and the command line.

Knows the engine by its public face alone (`sapwood.server.engine`); never touches a tensor, a block
or a sequence. `sapwood.server.app.create_app` builds the application.
"""
