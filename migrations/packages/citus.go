package packages

import (
	"embed"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strings"
	"testing/fstest"

	"github.com/jackc/tern/v2/migrate"
)

// What the functions have on Citus in place of passages of sql/, by the names of these.
//
//go:embed citus/*.sql
var citusSQL embed.FS

// citus makes files for psql that distribute an installed pgratelimit over the nodes of a Citus cluster, and that remove it.
func citus(s *source) (Files, error) {
	functions, twins, err := s.onCitus()
	if err != nil {
		return nil, err
	}
	data := struct {
		*source
		Functions string
		Twins     []string
	}{s, functions, twins}
	return s.execute(data, map[string]string{"citus.sql": "citus.sql", "citus_uninstall.sql": "citus_uninstall.sql"})
}

// onCitus renders the functions of the newest snapshot for Citus, and lists the functions that are distributed.
func (s *source) onCitus() (functions string, twins []string, err error) {
	merged := fstest.MapFS{}
	snapshots, err := fs.Glob(s.files, "snapshots/*")
	if err != nil || len(snapshots) == 0 {
		return "", nil, fmt.Errorf("citus: no snapshot: %w", err)
	}
	for _, dir := range []struct {
		files    fs.FS
		from, to string
	}{{s.files, snapshots[len(snapshots)-1], "."}, {citusSQL, "citus", "~citus"}} { // the last in order, so that it is read last
		err := fs.WalkDir(dir.files, dir.from, func(name string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			text, err := fs.ReadFile(dir.files, name)
			merged[path.Join(dir.to, strings.TrimPrefix(name, dir.from+"/"))] = &fstest.MapFile{Data: text}
			return err
		})
		if err != nil {
			return "", nil, err
		}
	}
	code, err := migrate.LoadCodePackage(merged)
	if err != nil {
		return "", nil, err
	}
	text, err := code.Eval(nil)
	if err != nil {
		return "", nil, err
	}
	for _, name := range ofOneBucket {
		if text, err = withTwin(text, name); err != nil {
			return "", nil, err
		}
		if twin := twinOf(name); strings.HasPrefix(name, "ratelimit_") {
			twins = append(twins, twin)
		}
	}
	return text, append(twins, "decide_here"), nil
}

// The functions that a twin decides for on the node that has the shard of the key: the public ones about one bucket, and those
// that the guards call.
var ofOneBucket = []string{
	"ratelimit_acquire", "ratelimit_peek", "ratelimit_refund", "ratelimit_reset", "ratelimit_charge", "ratelimit_settle",
	"ratelimit_reserve", "ratelimit_acquire_up_to", "ratelimit_hold", "ratelimit_renew", "ratelimit_release", "ratelimit.acquire", "ratelimit.peek",
}

// Arguments that do not survive the way to another node as text are checked before, too: not every interval can be read again.
var checkedHere = map[string]string{
	"ratelimit_reserve": `  if ratelimit.is_max_wait(max_wait) is not true then
    perform ratelimit.check_request(policy, key, cost, idempotency_key);
    perform ratelimit.check_max_wait(max_wait);
  end if;
`,
}

func twinOf(name string) string {
	return strings.TrimLeft(strings.TrimPrefix(name, "ratelimit"), "_.") + "_here"
}

var defaultOf = regexp.MustCompile(`\s+default\s+[^,]*`)

// withTwin splits a function. Its text goes to a twin, which Citus calls on the node that has the shard of the key. What is left
// has the name, the arguments and the settings, and calls the twin. It refuses a key that is null by itself, for which Citus
// would find no shard: Citus 13.2 crashes where a distributed function is called with one.
func withTwin(text, name string) (string, error) {
	find := regexp.MustCompile(`(?s)\ncreate or replace function ` + regexp.QuoteMeta(name) + `\(([^)]*)\)\n  returns (\S+)\n(.*?)as \$\$\n(.*?)\n\$\$;\n`)
	at := find.FindStringSubmatchIndex(text)
	if at == nil {
		return "", fmt.Errorf("citus: no function %s", name)
	}
	part := func(n int) string { return text[at[2*n]:at[2*n+1]] }
	arguments, result, settings, body := part(1), part(2), part(3), part(4)
	own := name[strings.LastIndexByte(name, '.')+1:]
	twin := twinOf(name)

	policy := own + ".policy"
	var call []string
	for argument := range strings.SplitSeq(arguments, ",") {
		argument = strings.Fields(argument)[0]
		value := own + "." + argument
		switch argument {
		case "key":
			value += ` collate "C"` // as the column has it
		case "v_policy": // a row of a table that the other node has, too
			value += ".name"
			policy = value
		}
		call = append(call, value)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\ncreate or replace function %s(%s)\n  returns %s\n%sas $$\n", name, arguments, result, settings)
	if result != "void" {
		fmt.Fprintf(&b, "declare\n  v_answer %s;\n", result)
	}
	fmt.Fprintf(&b, "begin\n  if %[1]s.key is null then\n    perform ratelimit.check_name('policy', %[3]s);\n    perform ratelimit.check_name('key', %[1]s.key);\n  end if;\n%[2]s", own, checkedHere[name], policy)
	if result == "void" {
		fmt.Fprintf(&b, "  perform d.* from ratelimit.%s(%s) as d;\nend;\n$$;\n", twin, strings.Join(call, ", "))
	} else {
		fmt.Fprintf(&b, "  select d.* into v_answer\n    from ratelimit.%s(%s) as d;\n  return v_answer;\nend;\n$$;\n", twin, strings.Join(call, ", "))
	}
	if strings.HasPrefix(name, "ratelimit_") { // the others have the twin of the public ones
		arguments = defaultOf.ReplaceAllString(arguments, "")
		fmt.Fprintf(&b, "create or replace function ratelimit.%s(%s)\n  returns %s\n%sas $$\n%s\n$$;\n", twin, arguments, result,
			strings.Replace(settings, "  security definer\n", "", 1),
			regexp.MustCompile(`\b`+own+`\.`).ReplaceAllString(body, twin+"."))
		fmt.Fprintf(&b, "comment on function ratelimit.%s is\n  'What %s does, on the node that has the shard of the key.';\n", twin, name)
	}
	return text[:at[0]] + b.String() + text[at[1]:], nil
}
