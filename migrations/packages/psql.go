package packages

// psql makes files that do for psql what Up and Down of package migrations do.
func psql(s *source) (Files, error) {
	files, err := s.execute(work{s, s.Known}, map[string]string{"install.sql": "install.sql"})
	if err != nil {
		return nil, err
	}
	back, err := load(s.files, map[string]any{"uninstall": true})
	if err != nil {
		return nil, err
	}
	return files.with(back.execute(work{back, nil}, map[string]string{"uninstall.sql": "uninstall.sql"}))
}
