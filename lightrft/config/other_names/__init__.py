"""Names of settings in other frameworks and in earlier versions, with the names they have here."""
