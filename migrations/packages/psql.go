package packages

import (
	"io/fs"
	"path"
	"strings"
	"testing/fstest"
)

// psql makes files that do for psql what Up and Down of package migrations do.
func psql(s *source) (Files, error) { return psqlOf(s, s.files) }

// psqlOf makes them with the migrations as these files have them.
func psqlOf(s *source, files fs.FS) (Files, error) {
	up, down := *s, *s
	var err error
	if up.Known, err = read(files, nil); err != nil {
		return nil, err
	}
	if down.Known, err = read(files, map[string]any{"uninstall": true}); err != nil {
		return nil, err
	}
	made, err := s.execute(work{&up, up.Known}, map[string]string{"install.sql": "install.sql"})
	if err != nil {
		return nil, err
	}
	return made.with(s.execute(work{&down, nil}, map[string]string{"uninstall.sql": "uninstall.sql"}))
}

// Psql makes the files of migrations/psql, from the directory of migrations. They are those of psql, but that psql reads from the files
// beside them what stands there without a template: parts of the migrations, and the functions, the newest of which are sql/.
func Psql(files fs.FS) (Files, error) {
	included := fstest.MapFS{}
	for _, pattern := range []string{"*.sql", "include/*.sql", "snapshots/*/*.sql", "snapshots/*/include/*.sql"} {
		names, err := fs.Glob(files, pattern)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			text, err := fs.ReadFile(files, name)
			if err != nil {
				return nil, err
			}
			isPart := pattern == "include/*.sql" || pattern == "snapshots/*/*.sql" && path.Base(name) != "install.sql"
			if isPart && !strings.Contains(string(text), "{{") {
				text = []byte(`\ir ../` + name)
			}
			included[name] = &fstest.MapFile{Data: text}
		}
	}
	s, err := load(files, nil)
	if err != nil {
		return nil, err
	}
	return psqlOf(s, included)
}
