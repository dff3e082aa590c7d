package packages

import (
	"fmt"
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
	snapshots, err := fs.Glob(files, "snapshots/*")
	if err != nil || len(snapshots) == 0 {
		return nil, fmt.Errorf("psql: no snapshot: %w", err)
	}
	included := fstest.MapFS{}
	err = fs.WalkDir(files, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		text, err := fs.ReadFile(files, name)
		included[name] = &fstest.MapFile{Data: text}
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, snapshot := range snapshots {
		names, err := fs.Glob(files, snapshot+"/*.sql")
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			text, err := fs.ReadFile(files, name)
			if err != nil {
				return nil, err
			}
			if path.Base(name) != "install.sql" && !strings.Contains(string(text), "{{") {
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
