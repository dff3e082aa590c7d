package packages

import (
	"io/fs"
	"path"
	"strings"
	"testing/fstest"
)

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

// Psql makes the files of migrations/psql, from the directory of migrations. They are those of psql, but that psql reads the
// functions from the snapshots, of which the newest is sql/. A file of a snapshot that has a template stands in them.
func Psql(files fs.FS) (Files, error) {
	included := fstest.MapFS{}
	for _, pattern := range []string{"*.sql", "snapshots/*/*.sql", "snapshots/*/include/*.sql"} {
		names, err := fs.Glob(files, pattern)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			text, err := fs.ReadFile(files, name)
			if err != nil {
				return nil, err
			}
			if pattern == "snapshots/*/*.sql" && path.Base(name) != "install.sql" && !strings.Contains(string(text), "{{") {
				text = []byte("\\ir ../" + name + "\n")
			}
			included[name] = &fstest.MapFile{Data: text}
		}
	}
	s, err := load(files, nil)
	if err == nil {
		s.Known, err = read(included, nil)
	}
	if err != nil {
		return nil, err
	}
	return psql(s)
}
