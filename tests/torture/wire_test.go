package torture

import (
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

// simple is SQL in the simple protocol.
func simple(sql string) kit.Message { return kit.Message{&pgproto3.Query{String: sql}} }

// extended is a statement prepared under a name, with parameters, in the extended protocol.
func extended(name string, formats []int16, parameters [][]byte) kit.Message {
	return kit.Message{
		&pgproto3.Bind{PreparedStatement: name, ParameterFormatCodes: formats, Parameters: parameters},
		&pgproto3.Execute{},
		&pgproto3.Sync{},
	}
}

func prepare(name, sql string) kit.Message {
	return kit.Message{&pgproto3.Parse{Name: name, Query: sql}, &pgproto3.Sync{}}
}
