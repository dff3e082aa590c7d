package packages

// pgTLE makes one file that tells pg_tle all scripts of the extension. They are those of CREATE EXTENSION.
func pgTLE(s *source) (Files, error) {
	scripts, err := s.scripts()
	if err != nil {
		return nil, err
	}
	data := struct {
		*source
		Scripts []script
	}{s, scripts}
	return s.execute(data, map[string]string{"pg_tle.sql": "pg_tle"})
}
