package migrations

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
)

// Databases have run what is released: it stays as it is, and nothing joins it. The snapshot of the newest release is a link to sql/, which
// the next version makes a copy: see CONTRIBUTING.md.
func TestReleased_NeverChanges(t *testing.T) {
	t.Parallel()
	require.Empty(t, changed(t, os.DirFS(".")))
}

func TestReleased_AChangeIsSeen(t *testing.T) {
	t.Parallel()
	file := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	for want, change := range map[string]func(fstest.MapFS){
		"":                           func(fstest.MapFS) {},
		"snapshots/001/a.sql is new": func(files fstest.MapFS) { files["snapshots/001/a.sql"] = file("x") },
		"snapshots/001/include/b.sql was changed": func(files fstest.MapFS) { files["snapshots/001/include/b.sql"] = file("x") },
		"001_install.sql is missing":              func(files fstest.MapFS) { delete(files, "001_install.sql") },
	} {
		files := fstest.MapFS{
			"001_install.sql":             file("one"),
			"snapshots/001/include/b.sql": file("two"),
			"snapshots/002/c.sql":         file("unreleased"),
			"released.sha256":             file(sum("one") + "  001_install.sql\n" + sum("two") + "  snapshots/001/include/b.sql\n"),
		}
		change(files)
		require.Equal(t, want, strings.Join(changed(t, files), ", "))
	}
}

func sum(text string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(text))) }

// changed says what differs from released.sha256, which is as sha256sum writes it.
func changed(t *testing.T, migrations fs.FS) (differences []string) {
	list, err := fs.ReadFile(migrations, "released.sha256")
	if !errors.Is(err, fs.ErrNotExist) { // before the first release
		require.NoError(t, err)
	}
	released := map[string]bool{}
	frozen := map[string]bool{} // snapshots of which a file is released
	for line := range strings.Lines(string(list)) {
		want, name, ok := strings.Cut(strings.TrimSpace(line), "  ")
		require.True(t, ok, line)
		released[name] = true
		if parts := strings.Split(name, "/"); parts[0] == "snapshots" {
			frozen[path.Join(parts[:2]...)] = true
		}
		if text, err := fs.ReadFile(migrations, name); err != nil {
			differences = append(differences, name+" is missing")
		} else if sum(string(text)) != want {
			differences = append(differences, name+" was changed")
		}
	}
	for snapshot := range frozen {
		require.NoError(t, fs.WalkDir(migrations, snapshot, func(name string, _ fs.DirEntry, err error) error {
			if err == nil && strings.HasSuffix(name, ".sql") && !released[name] {
				differences = append(differences, name+" is new")
			}
			return err
		}))
	}
	return differences
}
