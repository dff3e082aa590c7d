package packages

// goose makes a file for each migration; each direction is one statement to goose, which runs it in a transaction.
func goose(s *source) (Files, error) {
	return s.export(step.name, map[string]string{".sql": "goose"})
}
