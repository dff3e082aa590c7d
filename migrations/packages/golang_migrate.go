package packages

// golangMigrate makes two files for each migration. golang-migrate sends a file as one message, which PostgreSQL runs as one
// transaction; with x-multi-statement it would cut the file at each semicolon.
func golangMigrate(s *source) (Files, error) {
	return s.export(step.name, map[string]string{".up.sql": "up", ".down.sql": "down"})
}
