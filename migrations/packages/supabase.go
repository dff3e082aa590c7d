package packages

// supabase makes a file for each migration of the Supabase CLI, which knows no way back. The CLI sends the statements one by
// one, so the file begins its transaction itself.
func supabase(s *source) (Files, error) {
	return s.export(step.name, map[string]string{".sql": "supabase"})
}
