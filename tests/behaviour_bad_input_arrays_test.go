package tests

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// However an array is cut into dimensions, and wherever its subscripts begin, a batch is the elements
// one after another.
func TestBadInput_ArraysOfAnyShapeAreOneBatch(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.setClock(t0)
	for name, durability := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
		db.definePolicy(name, 10, 1, time.Hour, durability)
	}
	const elements = `'a','b','a','c','a','b'`
	answers := func(policies, keys, costs, idempotencyKeys string) []string {
		t.Helper()
		db.exec("truncate " + strings.Join(stateTables, ", "))
		db.exec("select ratelimit_acquire(p, k) from unnest(array['durable', 'ephemeral']) as p, unnest(array['a', 'b', 'c']) as k")
		batch := fmt.Sprintf("select format('%%s %%s', request, m) from ratelimit_acquire_many(%s, %s, %s, %s) as m",
			policies, keys, costs, idempotencyKeys)
		return append(column(t, db.DB, batch), column(t, db.DB, batch)...)
	}
	for _, policies := range []string{"{durable,durable,durable,durable,durable,durable}", "[7:12]={durable,ephemeral,durable,ephemeral,durable,ephemeral}"} {
		for _, last := range []string{"z", "y"} { // the second is used twice
			want := answers("'"+policies+"'", "array["+elements+"]", "array[1, 2, 3, 4, 5, 6]::bigint[]", "array[null, 'x', 'y', null, '"+last+"', null]")
			require.Len(t, want, 12)
			for _, keys := range []string{"'{{a,b},{a,c},{a,b}}'", "'[-5:-3][9:10]={{a,b},{a,c},{a,b}}'", "'[0:5]={a,b,a,c,a,b}'", "'{{{{{{a,b,a,c,a,b}}}}}}'"} {
				for _, costs := range []string{"'{{1,2,3},{4,5,6}}'", "'[2:7]={1,2,3,4,5,6}'"} {
					require.Equal(t, want, answers("'"+policies+"'", keys, costs, "'{{null,x,y},{null,"+last+",null}}'"), "%s %s", keys, costs)
				}
			}
		}
	}
}

// Twenty thousand requests in one call, most of them bad; and arrays that are large for nothing.
func TestBadInput_HugeArrays(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := newDB(t)
	db.definePolicy("p", 1_000_000, 1, time.Hour)
	const n = 20_000
	rows := column(t, db.DB, `
		select format('%s %s', coalesce(error_code, 'allowed'), count(*))
		  from ratelimit_acquire_many((select array_agg(case i % 4 when 0 then 'p' when 1 then 'nobody' when 2 then null else '' end order by i) from generate_series(1, $1) as i),
		                              array_fill('k'::text, array[$1]))
		 group by error_code order by 1`, n)
	require.Equal(t, []string{"22023 10000", "RL001 5000", "allowed 5000"}, rows)
	require.EqualValues(t, 1_000_000-n/4, db.left("p", "k"))

	before := rowsOf(t, db.DB)
	for _, sql := range []string{
		"select ratelimit_acquire_many(array_fill(null::text, array[10000000]), array['k'])",
		"select ratelimit_acquire_many(array['p'], array_fill(null::text, array[10000000]))",
		"select ratelimit_acquire_many(array['p'], array['k'], array_fill(1::bigint, array[10000000]))",
		"select ratelimit_acquire_many(array['p'], array['k'], null, array_fill(null::text, array[10000000]))",
		"select ratelimit_acquire('p', repeat('x', 10000000))",
		"select ratelimit_acquire(repeat('x', 10000000), 'k', 1, repeat('x', 10000000))",
		"select ratelimit_define_policy(repeat('x', 10000000), 1, 1, '1 second')",
	} {
		_, err := db.Pool.Exec(ctx, sql)
		require.Equal(t, "22023", sqlState(err), "%s: %v", sql, err)
	}
	require.Equal(t, before, rowsOf(t, db.DB))
}
