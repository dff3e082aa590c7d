package packages

import (
	"fmt"
	"io/fs"
)

const unpackaged = "unpackaged" // the version of an extension that was made of an installed schema

// A script is one of the extension, from a version or from none.
type script struct {
	From, To string // From is empty where it installs
	Text     string
}

// scripts are all scripts of the extension. Each release has one that installs it: PostgreSQL would otherwise look for a way
// from any version that it can install, and might begin with unpackaged.
func (s *source) scripts() (scripts []script, err error) {
	add := func(from, to, template string, data any) {
		if err != nil {
			return
		}
		var made Files
		made, err = s.execute(data, map[string]string{"": template})
		scripts = append(scripts, script{from, to, string(made[""]) + "\n"})
	}
	for i, r := range s.Releases {
		add("", r.Version, "create", r)
		if i > 0 {
			add(r.Previous().Version, r.Version, "update", r)
		}
	}
	add("", unpackaged, "adopt", s)
	for _, r := range s.Releases {
		add(unpackaged, r.Version, "adopted", r)
	}
	return scripts, err
}

// Until are the releases up to this one.
func (r *release) Until() []*release { return r.Releases[:r.number+1] }

// Previous is the release before this one.
func (r *release) Previous() *release { return r.Releases[r.number-1] }

// Installed is for the template expect.
func (r *release) Installed() map[string]any {
	return map[string]any{
		"From": r.Last(),
		"Hint": "See ratelimit_version() for the release that is installed, and update the extension to that one first.",
	}
}

// Comment describes the extension.
func (*source) Comment() string { return "token bucket rate limits" }

// extension makes the distribution for PGXN, which is all that make install-extension needs.
func extension(s *source) (Files, error) {
	files, err := s.execute(s, map[string]string{
		"pgratelimit.control": "pgratelimit.control",
		"META.json":           "META.json",
		"Makefile":            "pgxs.mk",
	})
	if err != nil {
		return nil, err
	}
	scripts, err := s.scripts()
	if err != nil {
		return nil, err
	}
	for _, script := range scripts {
		name := "pgratelimit--" + script.To + ".sql"
		use := "create extension pgratelimit"
		if script.From != "" {
			name = fmt.Sprintf("pgratelimit--%s--%s.sql", script.From, script.To)
			use = fmt.Sprintf("alter extension pgratelimit update to '%s'", script.To)
		} else if script.To == unpackaged {
			use += " version '" + unpackaged + "'"
		}
		files[name] = fmt.Appendf(nil, "\\echo Use \"%s\" to load this file. \\quit\n%s", use, script.Text)
	}
	for _, name := range []string{"LICENSE", "README.md", "CHANGELOG.md"} {
		if files[name], err = fs.ReadFile(s.repository, name); err != nil {
			return nil, err
		}
	}
	return files, nil
}

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
