package packages

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing/fstest"

	"github.com/jackc/tern/v2/migrate"
)

// The files of sql/ that are others on Citus.
//
//go:embed citus
var citusSQL embed.FS

// The files of sql/ of which Citus needs nothing: acquire_batch does without them.
var withoutCitus = []string{"take.sql", "demand.sql", "denials.sql", "decide_left.sql"}

// The passages of sql/ that are others on Citus, by the names of their files.
var onlyCitus = map[string]struct {
	passage *regexp.Regexp
	instead string
}{
	"acquire_all.sql":     {regexp.MustCompile(`(?s)  if current_setting\('transaction_read_only'\) = 'off' then.*?(\n\n  if not v_simple)`), "  -- Citus: acquire_batch decides.$1"},
	"decide_in_order.sql": {regexp.MustCompile(`lock table policies in access share mode;`), "-- Citus: a reference table is not locked here."},
	"settle_all.sql":      {regexp.MustCompile(`(?s)(> 9000000000000;\n    end loop;\n)(    for v_i)`), "$1" + severalKeys + "$2"},
	"usage.sql":           {regexp.MustCompile(`(?s)  return query execute \$sql\$.*?, v_policy;\n`), usageOfNodes},
	"drop_policy.sql":     {regexp.MustCompile(`(?s)  execute format\('delete.*?using policy_id;`), "  null;  -- Citus: the rows are left to clean-up"},
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

// onCitus renders the functions of sql/ for Citus, and lists the functions that are distributed.
func (s *source) onCitus() (functions string, twins []string, err error) {
	merged := fstest.MapFS{}
	for _, dir := range []struct {
		files fs.FS
		name  string
	}{{s.repository, "sql"}, {citusSQL, "citus"}} {
		names, err := fs.Glob(dir.files, dir.name+"/*.sql")
		if err != nil {
			return "", nil, err
		}
		for _, name := range names {
			text, err := fs.ReadFile(dir.files, name)
			if err != nil {
				return "", nil, err
			}
			merged[path.Base(name)] = &fstest.MapFile{Data: text}
		}
	}
	for _, name := range withoutCitus {
		merged[name] = &fstest.MapFile{Data: []byte("-- Citus: nothing of " + name + ".\n")}
	}
	for name, other := range onlyCitus {
		text := merged[name].Data
		if len(other.passage.FindAll(text, -1)) != 1 {
			return "", nil, fmt.Errorf("citus: no passage %s in %s", other.passage, name)
		}
		merged[name].Data = other.passage.ReplaceAll(text, []byte(other.instead))
	}
	code, err := migrate.LoadCodePackage(merged)
	if err != nil {
		return "", nil, err
	}
	text, err := code.Eval(nil)
	if err != nil {
		return "", nil, err
	}
	// Afterwards, because sql/twins.sql reads the functions as they are without Citus.
	var split strings.Builder
	for _, name := range ofOneBucket(text) {
		function, err := withTwin(text+forGuards, name)
		if err != nil {
			return "", nil, err
		}
		split.WriteString(function)
		if twin := twinOf(name); strings.HasPrefix(name, "ratelimit_") {
			twins = append(twins, twin)
		}
	}
	const epilogue = "do $epilogue$"
	before, after, found := strings.Cut(text, epilogue)
	if !found {
		return "", nil, errors.New("citus: no epilogue")
	}
	return before + split.String() + epilogue + after, append(twins, "decide_here"), nil
}

// forGuards are what sql/twins.sql makes.
const forGuards = `
create or replace function ratelimit.acquire(v_policy ratelimit.policies, key text, cost bigint, idempotency_key text)
  returns ratelimit.decision language plpgsql volatile
as $$

$$;

create or replace function ratelimit.settle(v_policy ratelimit.policies, key text, idempotency_key text, cost bigint)
  returns ratelimit.decision language plpgsql volatile
as $$

$$;

create or replace function ratelimit.peek(policy text, key text, cost bigint)
  returns ratelimit.decision language plpgsql stable
as $$

$$;
`

// ofOneBucket lists the functions that a twin decides for on the node that has the shard of the key: the public ones about one bucket, and
// those that the guards and ratelimit_settle_all call. Lists of a policy are about many. Overrides are in a table that all nodes have, and ratelimit_enforce calls ratelimit_acquire.
func ofOneBucket(text string) []string {
	var names []string
	for _, function := range aboutOneBucket.FindAllStringSubmatch(text, -1) {
		if !slices.Contains([]string{"ratelimit_override", "ratelimit_remove_override", "ratelimit_enforce", "ratelimit_grants", "ratelimit_usage"}, function[1]) {
			names = append(names, function[1])
		}
	}
	return append(names, "ratelimit.acquire", "ratelimit.settle", "ratelimit.peek")
}

var aboutOneBucket = regexp.MustCompile(`\ncreate or replace function (ratelimit_\w+)\(\s*policy\s+text,\s*key\s+text(?:,[^)]*)?\)`)

// Arguments that do not survive the way to another node as text are checked before, too: not every interval can be read again.
var checkedHere = map[string]string{
	"ratelimit_reserve": `  if ratelimit.is_max_wait(max_wait) is not true then
    perform ratelimit.check_request(policy, key, cost, idempotency_key);
    perform ratelimit.check_max_wait(max_wait);
  end if;
`,
	"ratelimit_pause": "  perform ratelimit.check_pause(policy, key, pause_for);\n",
}

func twinOf(name string) string {
	return strings.TrimLeft(strings.TrimPrefix(name, "ratelimit"), "_.") + "_here"
}

var defaultOf = regexp.MustCompile(`\s+default\s+[^,]*`)

// withTwin splits a function of a text. Its text goes to a twin, which Citus calls on the node that has the shard of the key. What is left
// has the name, the arguments and the settings, and calls the twin. It refuses a key that is null by itself, for which Citus
// would find no shard: Citus 13.2 crashes where a distributed function is called with one.
func withTwin(text, name string) (string, error) {
	find := regexp.MustCompile(`(?s)\ncreate or replace function ` + regexp.QuoteMeta(name) + `\(([^)]*)\)\n  returns (\S+)\s(.*?)as \$\$\n(.*?)\n\$\$;\n`)
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
	return b.String(), nil
}
