package packages

import (
	"fmt"
	"io/fs"
	"regexp"
	"strings"
)

var (
	// Files of which each function is about a table of durable policies and has its name at the end.
	aboutTables = []string{"quota.sql", "slots.sql", "take.sql", "deny.sql", "remember.sql", "rows.sql", "peeked.sql"}
	// Functions that end with a block for durable policies.
	withSteps = []string{"acquire", "charge", "settle", "reserve", "acquire_up_to", "pause", "hold", "renew", "release"}

	aboutTable = regexp.MustCompile(`\ncreate or replace function ratelimit\.(\w+_)(buckets|idempotency_keys|slots|leases)\(`)
	aboveIt    = regexp.MustCompile(`(?m)^--.*\n`)
	tableName  = regexp.MustCompile(`\b((?:from|update|into) (?:ratelimit\.)?|constraint )((?:buckets|idempotency_keys|slots|leases)(?: as | \(|_pkey ))`)
)

const copiesHead = `-- The functions of which the text is that of another one. Generated from the other files, which have the reasons: make psql.
--
-- First what the functions about durable policies do, on the unlogged tables of ephemeral ones. Then ratelimit_acquire and ratelimit_peek
-- for functions of this package, which do not depend on the schema of the public ones.

`

// Copies makes sql/copies.sql of the other files of that directory.
func Copies(sql fs.FS) (Files, error) {
	var ephemeral, forGuards strings.Builder
	var renamed []string // names of functions, each followed by its name for ephemeral policies
	for _, name := range aboutTables {
		text, err := fs.ReadFile(sql, name)
		if err != nil {
			return nil, err
		}
		for _, function := range aboutTable.FindAllStringSubmatch("\n"+string(text), -1) {
			renamed = append(renamed, function[1]+function[2], function[1]+"ephemeral_"+function[2])
		}
		if at := strings.Index("\n"+string(text), "\ncreate or replace function"); at >= 0 {
			ephemeral.Write(aboveIt.ReplaceAll(text[at:], nil))
			ephemeral.WriteByte('\n')
		}
	}
	for _, name := range withSteps {
		arguments, result, body, err := function(sql, name)
		if err != nil {
			return nil, err
		}
		steps := body[strings.Index(body, "\n  declare\n")+1 : len(body)-len("\nend;")]
		arguments = strings.Replace(arguments, "policy text", "v_policy ratelimit.policies", 1)
		writeFunction(&ephemeral, name+"_ephemeral", arguments, result, "volatile", steps, "The steps of ratelimit_"+name+" for an ephemeral policy.")
		if name == "acquire" {
			body = "begin\n  if not v_policy.durable then\n    return acquire_ephemeral(v_policy, key, cost, idempotency_key);\n  end if;\n" + steps + "\nend;"
			writeFunction(&forGuards, name, arguments, result, "volatile", body, "The steps of ratelimit_acquire, for the guards.")
		}
	}
	arguments, result, body, err := function(sql, "peek")
	if err != nil {
		return nil, err
	}
	writeFunction(&forGuards, "peek", arguments, result, "stable", body, "What ratelimit_peek does, for the guards.")

	text := tableName.ReplaceAllString(ephemeral.String(), "${1}ephemeral_$2")
	for n := 0; n < len(renamed); n += 2 {
		text = regexp.MustCompile(`\b`+renamed[n]+`\b`).ReplaceAllString(text, renamed[n+1])
	}
	return Files{"copies.sql": []byte(copiesHead + text + strings.TrimSuffix(forGuards.String(), "\n"))}, nil
}

var publicFunction = regexp.MustCompile(`(?s)create or replace function ratelimit_(\w+)\(([^)]*)\)\n  returns (\S+)\n.*?as \$\$\n(.*?)\n\$\$;`)

// function finds a public function in the file of its name. The arguments are in one line, without defaults.
func function(sql fs.FS, name string) (arguments, result, body string, err error) {
	text, err := fs.ReadFile(sql, name+".sql")
	if err != nil {
		return "", "", "", err
	}
	found := publicFunction.FindStringSubmatch(string(text))
	if found == nil || found[1] != name {
		return "", "", "", fmt.Errorf("%s.sql does not begin with the function ratelimit_%[1]s", name)
	}
	arguments = strings.Join(strings.Fields(defaultOf.ReplaceAllString(found[2], "")), " ")
	return arguments, found[3], found[4], nil
}

func writeFunction(b *strings.Builder, name, arguments, result, volatility, body, comment string) {
	var types []string
	for argument := range strings.SplitSeq(arguments, ", ") {
		types = append(types, argument[strings.IndexByte(argument, ' ')+1:])
	}
	fmt.Fprintf(b, "create or replace function ratelimit.%s(%s)\n  returns %s language plpgsql %s\nas $$\n%s\n$$;\n"+
		"comment on function ratelimit.%[1]s(%[6]s) is '%[7]s';\n\n",
		name, arguments, result, volatility, body, strings.Join(types, ", "), comment)
}
