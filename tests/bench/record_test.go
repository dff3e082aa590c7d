package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// rarely has the public functions that nobody calls for each request.
var rarely = []string{
	"ratelimit_cleanup", "ratelimit_cleanup_all", "ratelimit_define_policy", "ratelimit_define_shard", "ratelimit_doctor",
	"ratelimit_drop_policy", "ratelimit_grants", "ratelimit_holders", "ratelimit_override", "ratelimit_overrides", "ratelimit_policies", "ratelimit_remove_override",
	"ratelimit_reset_all", "ratelimit_shard", "ratelimit_status", "ratelimit_usage", "ratelimit_version",
}

// recordServer is where make puts the PostgreSQL of the record.
const recordServer = "../../build/postgresql-18/bin"

// It counts on the server of the record, and on no other: another compiler has other figures. make instructions gets that one,
// and RATELIMIT_TEST_INSTRUCTIONS=required fails instead of skipping.
func TestInstructions_NoCallTakesMoreThanIsRecorded(t *testing.T) {
	skip := func(format string, args ...any) {
		t.Helper()
		if os.Getenv("RATELIMIT_TEST_INSTRUCTIONS") == "required" {
			t.Fatalf(format, args...)
		}
		t.Skipf("NO CALL WAS COMPARED WITH THE RECORD: "+format, args...)
	}
	r := readRecord(t)
	if _, err := os.Stat(filepath.Join(recordServer, "postgres")); err != nil {
		skip("its server is not here: run make instructions")
	}
	if _, err := pgtest.Program(t.Context(), "valgrind"); err != nil {
		skip("%v", err)
	}
	t.Setenv("RATELIMIT_PG_BIN", recordServer)
	t.Setenv("RATELIMIT_TEST_REQUIRE", "local")
	var i instructions
	t.Cleanup(func() { require.NoError(t, i.close(t.Context())) })
	i.prepare(t.Context())
	if i.version != r.server {
		skip("it is of %s, and this is %s", r.server, i.version)
	}
	counts := kit.NoError(i.count(t.Context()))(t)
	for name, count := range counts {
		if c := r.find(name); c != nil {
			t.Logf("%-20s %8.0f %+6.2f %%", name, count.instructions, 100*(count.instructions/c.instructions-1))
		}
	}
	complaints := r.dearer(counts)
	require.Empty(t, complaints, "%s\nmake instructions-renew REASON='…' records it", strings.Join(complaints, "\n"))
}

// A function that is new must be counted, or be named as one of those that are called rarely.
func TestInstructions_OfAllFunctions(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	functions := kit.Column(t, db, "select distinct proname::text from pg_proc where proname like 'ratelimit\\_%' and pronamespace = 'public'::regnamespace")
	require.NotEmpty(t, functions)
	setUp := strings.Join(countedPolicies(), "\n") // has the guard's trigger
	for _, name := range functions {
		counted := slices.ContainsFunc(countedStatements, func(c counted) bool { return strings.Contains(c.sql, name+"(") }) ||
			strings.Contains(setUp, "execute function "+name+"(")
		require.NotEqual(t, counted, slices.Contains(rarely, name), "%s: is it counted?", name)
	}
	for _, name := range rarely {
		require.Contains(t, functions, name)
	}
}

func readRecord(t *testing.T) record {
	text := kit.NoError(os.ReadFile(recordFile))(t)
	r := kit.NoError(parseRecord(string(text)))(t)
	require.Equal(t, string(text), r.String(), "it is as it is written")
	return r
}

func TestRecord_HasTheCountedStatements(t *testing.T) {
	t.Parallel()
	var recorded, counted []string
	for _, c := range readRecord(t).calls {
		recorded = append(recorded, c.name)
	}
	for _, c := range countedStatements {
		counted = append(counted, c.name)
	}
	require.Equal(t, counted, recorded)
}

func TestRecord_NoticesThreePercent(t *testing.T) {
	t.Parallel()
	r := record{server: "this", calls: []recorded{{"acquire", writing{300_000, 1, 200}, ""}, {"peek", writing{instructions: 200_000}, "then"}}}
	require.Empty(t, r.dearer(map[string]writing{"acquire": {300_000 * 1.019, 1, 300}, "peek": {instructions: 100_000}}))
	require.Equal(t, []string{"acquire takes 309000 instructions, 3.0 % more than the 300000 recorded"},
		r.dearer(map[string]writing{"acquire": {instructions: 300_000 * 1.03}, "peek": {instructions: 200_000}}))
	require.Equal(t, []string{"acquire takes 2 transaction ids, more than the 1 recorded"}, r.dearer(map[string]writing{"acquire": {300_000, 2, 200}}))
	require.Equal(t, []string{"denied takes 1 instructions, and is not recorded"}, r.dearer(map[string]writing{"denied": {instructions: 1}}))
}

func TestRecord_RisesWithAReasonOnly(t *testing.T) {
	t.Parallel()
	old := record{server: "this"}
	counts := map[string]writing{}
	for _, c := range countedStatements {
		old.calls = append(old.calls, recorded{c.name, writing{1000, 1, 200}, "then"})
		counts[c.name] = writing{1000, 1, 200}
	}
	counts["acquire"], counts["peek"], counts["denied"] = writing{1030, 1, 200}, writing{1019, 0, 0}, writing{900, 1, 200}
	_, err := old.renewed("this", counts, "")
	require.ErrorContains(t, err, "acquire would rise from 1000 to 1030")

	next := kit.NoError(old.renewed("this", counts, "now"))(t)
	require.Equal(t, &recorded{"acquire", writing{1030, 1, 200}, "now"}, next.find("acquire"))
	require.Equal(t, &recorded{"peek", writing{1000, 0, 0}, "then"}, next.find("peek"), "what is within the tolerance stays")
	require.Equal(t, &recorded{"denied", writing{900, 1, 200}, "then"}, next.find("denied"))

	again, err := parseRecord(next.String())
	require.NoError(t, err)
	require.Equal(t, next, again)

	_, err = old.renewed("another", counts, "")
	require.Error(t, err)
}
