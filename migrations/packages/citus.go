package packages

import (
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strings"
	"testing/fstest"

	"github.com/jackc/tern/v2/migrate"
)

// What follows the functions of sql/ on Citus.
//
//go:embed citus/copies.sql
var copies string

// The passages of sql/ that are others on Citus, by the names of their files.
var onlyCitus = map[string]struct {
	passage *regexp.Regexp
	instead string
}{
	"settle_all.sql":  {regexp.MustCompile(`(?s)(> 9000000000000;\n    end loop;\n)(    for v_i)`), "$1" + severalKeys + "$2"},
	"usage.sql":       {regexp.MustCompile(`(?s)  return query execute \$sql\$.*?, v_policy;\n`), usageOfNodes},
	"drop_policy.sql": {regexp.MustCompile(`(?s)  execute format\('delete.*?using policy_id;`), "  null;  -- Citus: the rows are left to clean-up"},
}

const usageOfNodes = `  raise exception 'usage is not listed on Citus' using
    errcode = '0A000',
    detail  = 'The periods of a policy are on several nodes.',
    hint    = 'Read the table ratelimit.usage, which has the closed ones.';
`

// severalKeys refuses what acquire_all refuses there.
const severalKeys = `    if keys[1] collate "C" <> any (keys) then
      raise exception 'the buckets of a request must have one key' using
        errcode = '0A000',
        detail  = 'The keys may be on several nodes.',
        hint    = 'Settle the elements of each key in a call of its own.';
    end if;
`

// citus makes files for psql that distribute an installed pgratelimit over the nodes of a Citus cluster, and that remove it.
func citus(s *source) (Files, error) { return s.execute(s, "citus.sql", "citus_uninstall.sql") }

// OnCitus renders the functions of sql/ for Citus, and what makes copies of them.
func (s *source) OnCitus() (string, error) {
	merged := fstest.MapFS{}
	names, err := fs.Glob(s.repository, "sql/*.sql")
	if err != nil {
		return "", err
	}
	for _, name := range names {
		text, err := fs.ReadFile(s.repository, name)
		if err != nil {
			return "", err
		}
		merged[path.Base(name)] = &fstest.MapFile{Data: text}
	}
	for name, other := range onlyCitus {
		text := merged[name].Data
		if len(other.passage.FindAll(text, -1)) != 1 {
			return "", fmt.Errorf("citus: no passage %s in %s", other.passage, name)
		}
		merged[name].Data = other.passage.ReplaceAll(text, []byte(other.instead))
	}
	code, err := migrate.LoadCodePackage(merged)
	if err != nil {
		return "", err
	}
	text, err := code.Eval(nil)
	if err != nil {
		return "", err
	}
	const epilogue = "do $epilogue$"
	before, after, found := strings.Cut(text, epilogue)
	if !found {
		return "", errors.New("citus: no epilogue")
	}
	return before + copies + epilogue + after, nil
}
